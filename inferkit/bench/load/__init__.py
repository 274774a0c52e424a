"""A load that is put on a service: what is asked, by whom, and what it measures."""
