-- One consumer of a group reads a stream, and the others stand by.
-- KEYS: the stream, and the key that names the reader.
-- ARGV: the consumer that asks; for how many milliseconds it is the reader, 0 to give it up; and to read as well:
-- the group, the most entries, and the id to read after.
-- Returns false if another consumer is the reader. The check and the read are one step: a consumer that was paused
-- must not take new entries out of the group while another one is the reader.
local reader = redis.call('GET', KEYS[2])
if reader and reader ~= ARGV[1] then
  return false
end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[2])
  return false
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if not ARGV[3] then
  return {}
end
local found = redis.call('XREADGROUP', 'GROUP', ARGV[3], ARGV[1], 'COUNT', ARGV[4], 'STREAMS', KEYS[1], ARGV[5])
return found and found[1][2] or {}
