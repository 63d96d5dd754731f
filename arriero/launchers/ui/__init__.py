"""`arriero ui RUN`: a page about a run, served on this machine to whoever has its address."""
