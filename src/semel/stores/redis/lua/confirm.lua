#!lua flags=allow-oom
-- Touch a record that another connection or process wrote, so that WAIT covers it: WAIT only covers writes of its own
-- connection. ARGV: token; who has confirmed the result (see layout.py), or nothing, to change nothing. It does without
-- record.lua and reads only the header, because snapshots may be long.
local key, confirmed = KEYS[1], ARGV[2]
local head = redis.call('GETRANGE', key, 0, 11)
if string.sub(head, 5) ~= ARGV[1] then return 0 end
if confirmed == '' then
  confirmed = string.sub(head, 4, 4)
elseif string.byte(head, 2) ~= 2 then
  return 0
else -- others may have noted a stronger confirmation, which stays true
  local noted, new = string.byte(head, 4), string.byte(confirmed)
  if noted % 128 >= new % 128 and (noted >= 128 or new < 128) then confirmed = string.char(noted) end
end
redis.call('SETRANGE', key, 3, confirmed)
return 1
