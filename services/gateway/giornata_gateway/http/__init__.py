"""The HTTP door: routes, handlers, answers, event streams, the OpenAPI document and the studio's files."""
