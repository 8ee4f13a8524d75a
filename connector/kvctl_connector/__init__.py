"""The KV connector that vLLM loads, its local feed, and the relay that exports it.

Importing this package starts nothing and imports nothing heavy: vLLM imports the connector
in the API server, in the engine core and in every worker.
"""

__version__ = "0.1.0"
