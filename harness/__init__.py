"""How to put a question to production code and how to judge the answer."""
