"""What clients of A1111's API send, as parameters of Giornata's own jobs. Pure."""
