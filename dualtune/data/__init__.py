"""From files to micro-batches: readers, formats, chat templates and masks, and the order of the documents."""
