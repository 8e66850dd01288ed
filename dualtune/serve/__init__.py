"""An HTTP server in the form of OpenAI's API, over a loaded model and its adapters."""
