"""The page of all settings, made of the services' configurations."""
