"""From rows to conversations: formats, chat templates in a sandbox, and tool calls in the text of an answer."""
