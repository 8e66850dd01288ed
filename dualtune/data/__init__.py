"""The documents of a run: what the config's sources hold, tokenized, and which of them are held out."""
