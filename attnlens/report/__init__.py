"""How a report is shown: as sections with sentences, tables and pictures, rendered for several media."""
