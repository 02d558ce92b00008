-- A tenant's records, for quotas. "tenant" is fixed when a record is claimed, so renewing and completing stay HOT updates;
-- records without a tenant are not in it and cost nothing.
CREATE INDEX semel_record_tenant ON semel_record (tenant) WHERE tenant <> '';
