"""Published reports of hung jobs, rebuilt as small traces."""
