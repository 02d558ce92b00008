-- A tenant's records, for quotas. "tenant" is fixed when a record is claimed, so renewing and completing stay HOT updates;
-- records without a tenant are not in it and cost nothing.
--
-- Making it keeps writers waiting for as long as it takes. On a table with many records make it by hand first, by the
-- same statement with CONCURRENTLY after INDEX: then there is nothing left to do here.
CREATE INDEX IF NOT EXISTS semel_record_tenant ON semel_record (tenant) WHERE tenant <> '';
