#!lua flags=allow-oom
-- SaveStep; the first value of a name wins. ARGV: token, name, value, 1 if writes are confirmed.
local key, name = KEYS[1], ARGV[2]
local r = read(key)
if not r or r.token ~= ARGV[1] or r.state ~= RUNNING then return 0 end
local at = 61 + r.size
while at <= #r.value do
  local known, size, next = struct.unpack('>I4c0I4', r.value, at)
  if known == name then
    touch(r, key, ARGV[4])
    return 1
  end
  at = next + size
end
redis.call('APPEND', key, struct.pack('>I4c0I4c0', #name, name, #ARGV[3], ARGV[3]))
return 1
