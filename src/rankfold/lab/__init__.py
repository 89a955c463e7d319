"""The laboratory: language models trained, swept, compared and reported on the command line."""
