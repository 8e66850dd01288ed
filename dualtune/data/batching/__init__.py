"""From the documents of a run to micro-batches: which documents make up a step, in which rows."""
