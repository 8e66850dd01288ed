"""HTTP servers: of OpenAI's API over a loaded model and its adapters, and of the page of a run that trains."""
