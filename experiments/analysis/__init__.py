"""What finished runs say: their numbers, tables and curves."""
