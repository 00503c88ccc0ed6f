"""The cells behind a gateway: which there are, which one an edit goes to, and where its record lies."""
