#!lua flags=allow-oom
-- Mark the record before waiting, so that whoever ends the attempt publishes. Returns the lease left in ms, or -1 if no
-- attempt is running.
local key = KEYS[1]
local r = read(key)
if not r or r.state ~= RUNNING or r.lease_left <= 0 then return -1 end
if r.awaited == 0 then redis.call('SETRANGE', key, 3, '\1') end
return r.lease_left
