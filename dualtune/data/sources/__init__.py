"""From files, directories and hub datasets to rows, each with its path and line."""
