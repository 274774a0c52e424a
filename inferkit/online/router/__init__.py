"""The service that clients see: each request goes to a pair of a prefill and a decode instance."""
