"""After a verdict: new limits, smaller inputs, saved failures."""
