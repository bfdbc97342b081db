"""Servers, clusters, workers and a browser that tests run against."""
