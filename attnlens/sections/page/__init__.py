"""What a page says first, and what it lets its reader explore."""
