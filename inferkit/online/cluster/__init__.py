"""Router, prefill and decode instances on one host: started, watched and ended by one parent."""
