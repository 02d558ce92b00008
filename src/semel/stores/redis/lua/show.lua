-- Show a record in a list: the record without its steps or snapshot, and its times. See layout.py for the layout.
local head = redis.call('GETRANGE', KEYS[1], 0, 59)
if #head < 60 or string.byte(head, 1) ~= 1 then return false end
local lease_rest, ttl_rest, _, size = struct.unpack('>I8I8I8I4', string.sub(head, 33))
local pttl = redis.call('PTTL', KEYS[1])
if pttl < 0 then return false end
return {redis.call('GETRANGE', KEYS[1], 0, 59 + size), pttl - ttl_rest, pttl - lease_rest}
