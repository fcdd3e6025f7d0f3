"""From the body of an OpenAI request to the tokens of its prompt, for programs that forward it.

`openai_body.py` reads a body, `engine_tokenizer.py` asks engines, and `token_cache.py` remembers
what they answered. The endpoint picker (`edge/epp`) and the library for gateways (`gateway`) use
them.
"""
