"""Training draft heads on text that the target wrote itself, the target frozen (Medusa-1)."""
