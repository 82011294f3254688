"""What stands beside an asked kernel: simple alternatives to it, measured on the same windows."""
