"""The HTTP face of the engine: OpenAI-compatible generation, health, metrics, and `/cache` admin.

It owns the wire: shapes of requests and responses, errors, keys, limits, disconnects. It decides
nothing about the cache and counts nothing; what it reports it reads from the engine's ledger.

Where things are:

    settings.py     what an operator can set, checked at start, all problems at once
    app.py          puts the routes, the middleware and the error handlers together
    guard.py        request ids, keys, body limit: everything before a route sees the request
    errors.py       the OpenAI error shape, and which exception becomes which status
    requests.py     shapes that clients send       responses.py   shapes that they get
    prompts.py      text, messages or ids -> token ids within the context
    generation.py   one HTTP request -> engine sequences, and back; cancel on disconnect
    completions.py, chat.py, admin.py, status.py   the routes
    pins.py         the book of pins: budget and expiry
    lifecycle.py    start, ready, drain, exit
"""
