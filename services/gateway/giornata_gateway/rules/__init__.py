"""The rules by which bodies of requests are read: our forms and OpenAI's, A1111's. Pure."""
