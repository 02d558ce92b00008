#!lua flags=allow-oom
-- Complete: half of all commands, so it stands alone, without record.lua, and takes the string apart by hand.
-- ARGV: token, snapshot, ttl in ms, when that ends by the server's clock (8 bytes), whether writes are waited for, the
-- channel of those who wait.
local key = KEYS[1]
local value = redis.call('GET', key)
if not value or string.sub(value, 5, 12) ~= ARGV[1] then return 0 end
if string.byte(value, 2) == 2 then -- said before, by the same owner: its answer was lost on the way
  if ARGV[5] == '1' then redis.call('SETRANGE', key, 3, string.sub(value, 4, 4)) end
  return 1
end
local names = 60 + struct.unpack('>I4', value, 57)
redis.call('SET', key, string.sub(value, 1, 1) .. '\2' .. string.sub(value, 3, 3) .. '\0' .. string.sub(value, 5, 32)
  .. string.rep('\0', 16) .. ARGV[4] .. string.sub(value, 57, names) .. ARGV[2], 'PX', ARGV[3])
-- A refusal (an ACL without the channel) must not undo what was done.
if string.byte(value, 4) == 1 then redis.pcall('PUBLISH', ARGV[6], key) end
return 1
