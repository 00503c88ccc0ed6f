"""A campaign of tests and measurements on a GPU: ``python -m giornata_lab.rehearsals.gpu``, or ``make gpu``."""
