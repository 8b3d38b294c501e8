"""xylite against other engines: see __main__.py."""
