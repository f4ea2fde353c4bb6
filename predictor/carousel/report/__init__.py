"""``carousel report``: what benches and load tests measured, as a page, as Markdown and as pictures."""
