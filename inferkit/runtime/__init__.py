"""Assembly of one worker, worker processes, run directories."""
