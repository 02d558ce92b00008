"""What a service tells about its routes: OpenAPI documents and the design section."""
