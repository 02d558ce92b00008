#!lua flags=allow-oom
-- Complete. It is half of all commands, so it does without record.lua and takes the string apart by hand.
-- ARGV: token, snapshot, ttl in ms, when the ttl ends by the server's clock (8 bytes), 1 if writes are confirmed, the
-- wake-up channel.
local key = KEYS[1]
local value = redis.call('GET', key)
if not value or string.sub(value, 5, 12) ~= ARGV[1] then return 0 end
if string.byte(value, 2) == 2 then -- the same owner sent it before, and the reply was lost
  if ARGV[5] == '1' then redis.call('SETRANGE', key, 3, string.sub(value, 4, 4)) end
  return 1
end
local names = 60 + struct.unpack('>I4', value, 57)
redis.call('SET', key, string.sub(value, 1, 1) .. '\2' .. string.sub(value, 3, 3) .. '\0' .. string.sub(value, 5, 32)
  .. string.rep('\0', 16) .. ARGV[4] .. string.sub(value, 57, names) .. ARGV[2], 'PX', ARGV[3])
-- pcall: if an ACL forbids the channel, the write must not be undone.
if string.byte(value, 4) == 1 then redis.pcall('PUBLISH', ARGV[6], key) end
return 1
