"""What goes over HTTP between the dispatcher and those who talk to it: workers, sources, people.

One definition for both ends: the API decodes what it is sent into these, strictly, and the clients
decode what they are answered. Requests end in `Ask`. An unknown field of a request is an error; one
of an answer is from a later release and is passed over. Times are the database's. Wherever a call
is about several tasks, each has its own answer, with the status that it would have had alone.

Called by `dispatcher.api`, `dispatcher.client`, the worker, and sources.
"""
