"""From conversations to token ids and loss masks: tokenizers, and the store and cache of what they made."""
