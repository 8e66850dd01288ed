"""x"""


def test_it(any_lab):
    ended = any_lab.run()
    for r in ended.rows:
        if "event" in r:
            print(r)
    print(ended.policy.statistics().table(), ended.updates())
