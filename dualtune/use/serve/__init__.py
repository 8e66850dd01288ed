"""An HTTP server of OpenAI's API over a loaded model and its adapters."""
