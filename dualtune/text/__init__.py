"""Text that people read: numbers, tables, other people's text, and secrets blotted out."""
