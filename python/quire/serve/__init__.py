"""The HTTP server of `quire serve`: today's clients of OpenAI and Anthropic, over one engine.

`app.py` has the routes, `guard.py` the layer before all of them, `protocol.py` the limits of
connections, and `_streams.py` is the only module that touches the engine's requests.
"""
