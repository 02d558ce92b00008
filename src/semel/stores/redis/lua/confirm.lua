#!lua flags=allow-oom
-- A write that is waited for (WAIT), on behalf of a record that was written on another connection, or by someone else:
-- WAIT speaks of what its own connection has written. ARGV: token; who has confirmed the answer (see values.py), or
-- nothing, to change nothing. It stands alone, and reads no more than it needs: snapshots may be long.
local key, confirmed = KEYS[1], ARGV[2]
local head = redis.call('GETRANGE', key, 0, 11)
if string.sub(head, 5) ~= ARGV[1] then return 0 end
if confirmed == '' then
  confirmed = string.sub(head, 4, 4)
elseif string.byte(head, 2) ~= 2 then
  return 0
else -- others may have waited for more: what they wrote down stays true
  local known, told = string.byte(head, 4), string.byte(confirmed)
  if known % 128 >= told % 128 and (known >= 128 or told < 128) then confirmed = string.char(known) end
end
redis.call('SETRANGE', key, 3, confirmed)
return 1
