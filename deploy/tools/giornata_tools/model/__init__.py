"""Small models with random weights, for `giornata up --family` and for tests."""
