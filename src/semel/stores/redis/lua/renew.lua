#!lua flags=allow-oom
-- Renew; never shortens the lease. ARGV: token, lease in ms.
local key = KEYS[1]
local r = read(key)
if not r or r.token ~= ARGV[1] or r.state ~= RUNNING then return 0 end
local life, lease_rest, ttl_rest = times(r.takeover ~= RETRY, math.max(tonumber(ARGV[2]), r.lease_left), r.left)
redis.call('SETRANGE', key, 32, struct.pack('>I8I8', lease_rest, ttl_rest))
redis.call('PEXPIRE', key, string.format('%.0f', math.max(life, 1)))
return 1
