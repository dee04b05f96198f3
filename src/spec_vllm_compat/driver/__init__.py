"""The driver's side: the process in which the generator runs."""
