"""A language model behind a server with OpenAI's API, evaluated by workflows."""
