"""Terminal, HTML, JUnit and Markdown from a result alone."""
