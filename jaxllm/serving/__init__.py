"""Models behind HTTP, for whatever speaks the OpenAI protocol (extra `serve`)."""
