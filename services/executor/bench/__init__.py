"""`shoal bench executor`: where the time of a step goes, beside what the machine could do at best."""
